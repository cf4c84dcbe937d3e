"""``python -m t1_env``: the same as ``t1-env``."""

import sys

from t1_env.cli.main import main

sys.exit(main())
