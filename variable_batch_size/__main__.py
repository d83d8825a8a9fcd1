"""`python -m variable_batch_size` is the command `vbs`."""

from variable_batch_size.cli.main import main

if __name__ == "__main__":
    main()
