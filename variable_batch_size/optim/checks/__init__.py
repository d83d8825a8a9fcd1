"""What an optimizer looks at before it is wrong: ranks that differ, layers and parameters that do not fit."""
