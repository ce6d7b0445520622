"""`python -m router`: calls cli.main."""

import sys

from router.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
