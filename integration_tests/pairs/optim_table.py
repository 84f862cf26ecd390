# SPDX-License-Identifier: Apache-2.0
"""Lists the features that can be combined in a data-parallel training by `sluice.optim` instead of `torch.optim`."""

from pair_table import NOBODY, Rule, Table

FACTORS = {
    "kind": ("adamw", "adam"),
    "dtype": ("f32", "bf16", "autocast"),
    "ranks": ("byhand", "ddp", "group"),
    "states": ("memory", "file"),
    "scaler": ("unscaled", "scaler"),
    "clipping": ("unclipped", "maxnorm", "clipgrad"),
    "groups": ("onegroup", "twogroups"),
    "rate": ("steady", "decaying"),
    "accumulation": ("onestep", "twosteps"),
    "gradients": ("everyone", "fzpart", "missing", "infinite"),
    "zeroing": ("tonone", "tozero"),
    "saving": ("unsaved", "saved", "crossed"),
    "checking": ("checked", "unchecked"),
    "variant": ("plain", "amsgrad", "maximize", "fused"),
}

RULES = (
    Rule({"variant": "amsgrad"}, "does not support amsgrad: leave it out"),
    Rule({"gradients": "missing", "states": "file"}, "with a state_file each parameter needs one in every step"),
    Rule({"clipping": "clipgrad", "ranks": "group", "scaler": "scaler"}, "clip by its max_norm"),
    Rule({"clipping": "clipgrad", "ranks": "group"}, "before a step no rank has the mean: documented", by=NOBODY),
    Rule({"gradients": "infinite", "checking": "unchecked"}, "the caller knows that they are finite", by=NOBODY),
)
TABLE = Table(FACTORS, RULES, daily=6)
