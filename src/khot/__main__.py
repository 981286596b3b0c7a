"""``python -m khot``."""

import sys

from khot.cli import main

sys.exit(main())
