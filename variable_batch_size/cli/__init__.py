"""The command `vbs`: `main` runs it, `app` names the commands; each is a file or lies with its group.

`command` makes a function one, with the `options` that several have; `output` prints and writes. `comparison` is what
`simulate` prints.
"""
