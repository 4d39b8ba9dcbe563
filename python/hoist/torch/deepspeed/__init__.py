# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints: a run that DeepSpeed began continues in hoist, and a run of hoist's continues in DeepSpeed.

    engine = hoist.torch.wrap(model, config, deepspeed="checkpoints")                    # from DeepSpeed

    hoist.torch.deepspeed.export("/local_nvme", "checkpoints", config)                   # and back
    python -m hoist.torch.deepspeed export /local_nvme --to checkpoints --config ds_config.json
    python -m hoist.torch.deepspeed inspect checkpoints

Reads files of ZeRO stages 1, 2 and 3 from any number of ranks, and universal checkpoints. No code in a file runs: classes other
than the few that DeepSpeed's own state needs are refused by name.
"""

from __future__ import annotations

from hoist.torch.deepspeed.checkpoint import Checkpoint, open
from hoist.torch.deepspeed.universal import export

__all__ = ["Checkpoint", "export", "open"]
