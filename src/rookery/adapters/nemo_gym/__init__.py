"""Agent server for NeMo Gym and NeMo RL: `rookery serve ENV --protocol nemo-gym --policy URL`.

`POST /run` runs one row of the data set and returns Gym's verify response. `POST /aggregate_metrics` returns
means.

Guarantees:
- Each trained turn is one output item with `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`
  from the journal. Each prompt starts with the tokens before it, which NeMo RL asserts and this server checks.
- A status of 5xx (or 429, if too many requests wait) means that the infrastructure failed, so that NeMo RL retries
  the row. A row for which a retry would not help (a broken task, a bug in the environment) is answered with 422.
- NeMo RL takes one token sequence per rollout. Of a rollout with several segments, the one with the most trained
  tokens is sent, and `rookery.tokens_left_out` counts the others.
- A client that disconnects cancels its rollout.
- Requests of web pages are refused: a browser sends `Origin`, and the server has no key.
"""

from rookery.adapters.nemo_gym.responses import ContiguityError, check_contiguous, make_response
from rookery.adapters.nemo_gym.server import NemoGymServer

__all__ = ["ContiguityError", "NemoGymServer", "check_contiguous", "make_response"]
