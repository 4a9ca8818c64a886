"""`python -m clover_cpp`: the command `clover`."""

from .cli import main

main(prog_name="clover")
