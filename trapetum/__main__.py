"""``python -m trapetum``: the command line."""

from trapetum.cli import main

if __name__ == "__main__":
    main()
