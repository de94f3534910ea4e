"""The demo job on TRL's GRPOTrainer, for vs_trl.py: run by the Python of an environment that has TRL.

    python benchmarks/trl_job.py MODEL SEED STEPS GROUPS SAMPLES LR   (the example's folder in PYTHONPATH)

TRL's own defaults that only suit a GPU are changed (bf16, gradient checkpointing, which make it slower on a CPU); everything that
shapes the learning is what the run file of the other side says. CPU seconds are of this process from the first batch on, without
imports. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_DISABLED": "true"}

import task
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main(folder: str, seed: int, steps: int, groups: int, samples: int, lr: float) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [task.prompts(seed, index) for index in range(groups * steps)]
    marks: list[tuple[float, float, float]] = []

    def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        """1 for exactly the answer, ended by the policy itself, as in the example."""
        triples = zip(completions, completion_ids, answer, strict=True)
        scores = [float(list(ids)[-1:] == [tokenizer.eos_token_id] and text == right) for text, ids, right in triples]
        marks.append((time.process_time(), time.perf_counter(), sum(scores) / len(scores)))
        return scores

    started: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
            started.append((time.process_time(), time.perf_counter()))

    options = GRPOConfig(
        output_dir="trl_out",
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        learning_rate=lr,
        lr_scheduler_type="linear",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=groups * samples,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=samples,
        max_steps=steps,
        max_completion_length=6,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        seed=seed,
        data_seed=seed,
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    cpu, wall = started[0]
    print(
        json.dumps(
            {
                "cpu_s": time.process_time() - cpu,
                "wall_s": time.perf_counter() - wall,
                "rewards": [mark[2] for mark in marks],
                "cpu_at": [mark[0] - cpu for mark in marks],
            }
        )
    )


if __name__ == "__main__":
    seed, steps, groups, samples = (int(value) for value in sys.argv[2:6])
    main(sys.argv[1], seed, steps, groups, samples, float(sys.argv[6]))
