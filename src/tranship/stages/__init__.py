"""The dataflow table, and one file per stage. A stage never calls a stage: it takes columns, works, and puts columns.

| stage | reads | writes |
|---|---|---|
| rollout | prompt, prompt_info | response, response_mask, logprobs, policy_versions, finish_reason |
| reward | prompt_info, response, finish_reason | reward (scored / masked / invalid with a reason) |
| reference (only with a KL term) | prompt, response | ref_logprobs |
| advantage | whole groups: reward, response_mask, and what a sample's record shows | advantages, loss_mask |
| train | prompt, response, loss_mask, logprobs, policy_versions, advantages, (ref_logprobs) | the policy version |
| validate | held-out groups: prompt, prompt_info, response, finish_reason, reward | nothing |
"""

from tranship.stages.stage import Stage, Stopwatch
from tranship.stages.table import PROMPT_COLUMNS, StageSpec, check_table, stage_table

__all__ = ["PROMPT_COLUMNS", "Stage", "StageSpec", "Stopwatch", "check_table", "stage_table"]
