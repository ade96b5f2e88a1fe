import sys

from shoal.agent.main import main

sys.exit(main())
