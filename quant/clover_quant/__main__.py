"""`python -m clover_quant`: the command `clover-quantize`."""

from clover_quant.cli import main

main(prog_name="clover-quantize")
