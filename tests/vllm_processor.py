"""A custom logits processor of ``test_vllm.py``: whatever the model says, it is token 7."""

from vllm.v1.sample.logits_processor import LogitsProcessor


class AlwaysSeven(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        logits[:, 7] = 1e4
        return logits
