"""``python -m bayesfed``: the command line, where the script ``bayesfed`` is not on the path."""

from bayesfed.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
