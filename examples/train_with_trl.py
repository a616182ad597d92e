"""Train the embedded policy on arithmetic with TRL's `GRPOTrainer`, on a CPU: two steps."""

from trl import GRPOConfig, GRPOTrainer

from rookery.adapters.trl import embedded_tokenizer, reward, rollout_func
from rookery.upstreams.embedded import load_builtin_weights

weights = load_builtin_weights()
weights.save("policy.safetensors")  # the file that the policy is served from, and that new weights go to

with rollout_func(
    "arithmetic",  # a name, module:attr, file.py, or an Environment object
    policy="embedded:policy.safetensors",
    runners=1,
) as rollouts:
    trainer = GRPOTrainer(
        model=weights.to_model(),
        processing_class=embedded_tokenizer(),
        train_dataset=rollouts.dataset(),
        rollout_func=rollouts,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir="out",
            num_generations=4,
            per_device_train_batch_size=8,
            max_completion_length=200,
            max_steps=2,
            learning_rate=1e-4,
            logging_steps=1,
            scale_rewards="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
        ),
    )
    trainer.train()
