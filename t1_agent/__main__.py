"""``python -m t1_agent`` is ``t1-agent``."""

import sys

from t1_agent.cli.main import main

sys.exit(main())
