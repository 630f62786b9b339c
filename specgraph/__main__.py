"""`python -m specgraph`."""

from .cli import main

main()
