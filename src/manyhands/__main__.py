"""python -m manyhands, which is also how torchrun starts it."""

from manyhands.cli.main import main

main()
