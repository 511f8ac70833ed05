"""Flags about checkpoints: where a run starts from and what it leaves behind."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag


@dataclass
class CheckpointFlags:
    """Checkpoint."""

    load: str | None = flag(
        None, "folder of checkpoints to resume from (may be empty if it is also --save)", metavar="DIR"
    )
    ckpt_step: int | None = flag(None, "which checkpoint of --load; default: the latest", ge=0)
    finetune: bool = flag(False, "take only the weights of --load and start from rollout 0")
    save: str | None = flag(None, "folder to save checkpoints in", metavar="DIR")
    save_interval: int | None = flag(None, "rollouts between checkpoints", ge=1)
    no_load_optim: bool = flag(False, "leave the optimizer's state in --load alone: moments start from zero")
    no_load_rng: bool = flag(False, "leave the random state in --load alone: it starts from --seed")
    no_load_verify: bool = flag(
        False,
        "do not read the files of --load to compare them with their checksums; sizes are compared all the "
        "same",
    )
    async_save: bool = flag(
        False, "checkpoints are written while training goes on; the next one and the end wait"
    )
    keep_last_n: int | None = flag(None, "how many checkpoints of --save stay; default: all", ge=1)
    no_save_optim: bool = flag(
        False, "leave the optimizer out of checkpoints; they then load with --finetune only"
    )
    save_hf: str | None = flag(None, "also write a Hugging Face folder: hf/{rollout_id}", metavar="TEMPLATE")
    ref_load: str | None = flag(
        None,
        "reference model for the KL, or a folder of checkpoints; default: --hf-checkpoint",
        metavar="MODEL",
    )
    ref_ckpt_step: int | None = flag(None, "which checkpoint of --ref-load; default: the latest", ge=0)
