"""Advice on keys and values of other frameworks."""

import re

_TYPE = {
    "optimizer.learning_rate": "lr learning_rate optimizer.lr max_lr peak_lr",
    "optimizer.name": "optim optimizer_name optimizer.type",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type scheduler schedule lr_schedule",
    "optimizer.warmup": "warmup warmup_steps warmup_iters optimizer.warmup_steps lr_warmup_steps",
    "optimizer.weight_decay": "weight_decay wd optimizer.wd optimizer.decay",
    "optimizer.b1": "beta1 adam_beta1 optimizer.beta1",
    "optimizer.b2": "beta2 adam_beta2 optimizer.beta2",
    "optimizer.epsilon": "eps adam_epsilon adam_eps optimizer.eps",
    "optimizer.clip": "grad_clip max_grad_norm clip_grad gradient_clip_val",
    "seq": "block_size seq_len seq_length sequence_length max_seq_len max_seq_length n_ctx context_length",
    "steps": "max_steps max_iters num_steps train_steps total_steps num_train_steps iterations",
    "accumulate": "gradient_accumulation_steps grad_accum accum_steps accumulate_grad_batches",
    "run_dir": "output_dir out_dir log_dir save_dir workdir default_root_dir",
    "model.layers": "n_layer n_layers num_layers layers",
    "model.heads": "n_head n_heads num_heads num_attention_heads heads",
    "model.num_kv_heads": "n_kv_head n_kv_heads num_key_value_heads model.kv_heads",
    "model.head_dim": "head_dim head_width",
    "model.mlp_dim": "ffn_dim d_ff intermediate_size ffn_hidden_size mlp_width model.mlp_width",
    "model.width": "n_embd d_model hidden_size dim width",
    "dtype": "compute_dtype torch_dtype",
    "checkpoint.every": "save_every save_steps checkpoint_interval save_interval checkpoint_every",
    "eval.every": "eval_every eval_steps eval_interval val_check_interval",
    "log_every": "logging_steps log_interval log_frequency",
    "init": "model_name_or_path pretrained_model_name_or_path from_pretrained hf_model base_model",
}
_BY_NAME = {name: key for key, names in _TYPE.items() for name in names.split()}
_SENTENCES = {
    "per_device_batch_size per_device_train_batch_size micro_batch_size batch_size global_batch_size train_batch_size":
        "batch= counts the sequences of one step of the whole job: type batch=N, N = devices x sequences a device.",
    "resume resume_from resume_from_checkpoint auto_resume load_checkpoint checkpoint.resume checkpoint.load":
        "A run_dir= with a checkpoint is resumed without a key. init_from=RUN_DIR starts a new run from its weights.",
    "use_wandb wandb_project report_to logger":
        "Type wandb=PROJECT for Weights & Biases. Metrics are also in RUN_DIR/metrics.jsonl and RUN_DIR/tensorboard: "
        "type tensorboard --logdir RUN_DIR/tensorboard.",
    "epoch epochs num_epochs num_train_epochs max_epochs":
        "Type steps=N, N = epochs x training tokens / (batch x seq).",
    "optimizer": "It is a group of keys: type optimizer.name=lion for another optimizer, or such as optimizer.b2=0.99.",
    "optimizer.betas betas adam_betas": "Type optimizer.b1=0.9 optimizer.b2=0.95.",
    "dataset data_path dataset_path train_file":
        "Type data=text data.path=FILE (or data=jsonl, parquet, tokens or chat), and data=hf for one of the hub.",
    "fsdp": "Type parallel=fsdp for products whose weights are gathered, or shard=parameters for ZeRO 3.",
    "zero zero_stage": "Type shard=optimizer for ZeRO 1, shard=gradients for ZeRO 2 or shard=parameters for ZeRO 3.",
    "fp16 bf16 amp mixed_precision": "Type dtype=bf16 (weights and moments stay in float32) or dtype=f32.",
    "gradient_checkpointing activation_checkpointing checkpointing recompute":
        "Type remat=full (recompute every layer) or remat=dots (keep matmul outputs).",
    "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline.stages stages":
        "Type mesh=stageN-rowR-colC, such as mesh=stage4-row2-col4, for a pipeline of N stages.",
    "cp sp context_parallel context_parallel_size sequence_parallel":
        "Type mesh=contextN-rowR-colC, such as mesh=context2-row2-col4, to split sequences over N devices.",
    "ep expert_parallel expert_parallel_size expert_model_parallel_size":
        "Type mesh=expertN-rowR-colC, such as mesh=expert4-row2-col4, to put experts on N devices.",
    "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size dp data_parallel data_parallel_size":
        "Type mesh=DATAxROWxCOL, such as mesh=2x4x8, and parallel=megatron for one-dimensional tensor parallelism.",
    "vocabulary model.vocabulary": "Type model.vocab_size=N, or vocab_size=N for the size of a tokenizer=bpe.",
    "compile jit": "Every step is compiled. No key is needed.",
    "gpus devices num_gpus nproc_per_node": "All devices are used. Type mesh=ROWxCOL to arrange them.",
}  # fmt: skip
_BY_NAME_SENTENCE = {name: sentence for names, sentence in _SENTENCES.items() for name in names.split()}


def answer(key: str, value: str) -> str | None:
    """What to type instead of `key=value`; None for an unknown key or value."""
    if key in _BY_NAME:
        return f"Type {_BY_NAME[key]}={value}."
    if key in _BY_NAME_SENTENCE:
        return _BY_NAME_SENTENCE[key]
    text = str(value).lower()
    if key == "mesh" and re.fullmatch(r"\[?[1-9]\d*(,[1-9]\d*)+\]?", text):
        shape = text.strip("[]").replace(",", "x")
        return f"mesh={value} lists several values. Type mesh={shape} for one mesh, or add -m to run each value."
    if key == "pipeline.layers" and re.fullmatch(r"[1-9]\d*(,[1-9]\d*)+", text):
        return f'pipeline.layers={value} lists several values. Type pipeline.layers="{text.replace(",", " ")}".'
    if key == "wandb" and text in ("true", "false"):
        return f"wandb={text} is not the name of a project. Type wandb=PROJECT, or nothing."
    if key == "remat" and text in ("true", "false"):
        kept = "remat=full (recompute every layer) or remat=dots (keep matmul outputs)"
        return f"remat={text} is not a choice. Type {kept if text == 'true' else 'remat=none'}."
    return None
