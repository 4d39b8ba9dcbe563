# SPDX-License-Identifier: Apache-2.0
"""python -m hoist.torch.finetune"""

import sys

from hoist.torch.finetune import main

sys.exit(main())
