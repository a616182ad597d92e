"""Stand-ins for vLLM and SGLang: their wire formats on top of the embedded policy, for tests without a GPU.

The tokens are sampled, not canned; ids are those of the embedded policy. What was read: vLLM at a014e35 and SGLang
at cce0a12, both of 22 August 2026.

Promises:
- field by field what the real server answers, and what it refuses is refused with its status and error object;
- what the real server passes over is passed over and can be looked up at `/standin/ignored`;
- what the real server honours and the stand-in cannot do is refused with 501, never passed over;
- every fault that a test asks for at `/standin/faults` happens to the next requests and to no other.
"""

from rookery.upstreams.embedded.standins.faults import Fault
from rookery.upstreams.embedded.standins.sglang import SGLangStandin
from rookery.upstreams.embedded.standins.shell import Standin
from rookery.upstreams.embedded.standins.vllm import VLLMStandin

SPEAKS = {"vllm": VLLMStandin, "sglang": SGLangStandin}

__all__ = ["SPEAKS", "Fault", "SGLangStandin", "Standin", "VLLMStandin"]
