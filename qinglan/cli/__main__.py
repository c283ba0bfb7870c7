"""`python -m qinglan.cli`."""

from qinglan.cli import main

if __name__ == "__main__":
    main()
