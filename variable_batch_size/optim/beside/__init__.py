"""What follows the updates of an optimizer, or judges them, and changes no gradient."""
