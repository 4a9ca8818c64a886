"""`python -m clover_convert`."""

from clover_convert.cli import main

main(prog_name="clover-convert")
