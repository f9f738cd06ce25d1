"""The dataflow table, and one file per stage. A stage never calls a stage: it takes columns, works, and puts columns.

| stage | reads | writes |
|---|---|---|
| rollout | prompt, prompt_info | response, response_mask, logprobs, policy_versions, finish_reason, rollout_info |
| reward_model (if there is one) | prompt, response | model_score |
| reward | prompt_info, response, finish_reason, rollout_info, (model_score) | reward (scored, masked, or invalid) |
| reference (only with a KL term, and for dpo) | prompt, response | ref_logprobs |
| value (ppo) | prompt, response | values |
| advantage | groups: reward, response_mask, a record, (ref_logprobs, values) | advantages, loss_mask, (returns) |
| recorded (sft, dpo; in the place of what samples) | prompt, prompt_info | response, advantages, loss_mask |
| train | prompt, response, loss_mask, advantages, (what the algorithm needs of the rest) | the policy version |
| validate | held-out groups: prompt, prompt_info, response, finish_reason, rollout_info, reward | nothing |
"""

from tranship.stages.stage import Stage, Stopwatch
from tranship.stages.table import PROMPT_COLUMNS, StageSpec, check_table, evaluation_table, stage_table

__all__ = ["PROMPT_COLUMNS", "Stage", "StageSpec", "Stopwatch", "check_table", "evaluation_table", "stage_table"]
