"""`python -m areal_async`: the command line, as `areal-async` is."""

from areal_async.cli.main import app

if __name__ == "__main__":
    app(prog_name="areal-async")
