"""`python -m worker`: the worker program."""

from worker.program.main import main

if __name__ == "__main__":
    main()
