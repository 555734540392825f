"""Train the model in WORK/model with peft (LoRA, merged) and with trl (SFT); runs in their own
environment.
"""

import sys
from pathlib import Path
from typing import Any

import torch

TOKENS = torch.arange(20).view(1, 20)


def save(model: Any, work: Path, name: str) -> None:
    """Save a trained model, and its logits in fp32."""
    model.save_pretrained(work / name)
    with torch.no_grad():
        logits = model.eval()(TOKENS).logits
    torch.save(logits, work / f"{name}_logits.pt")


def train_lora(work: Path) -> None:
    """Train LoRA matrices of attention for two steps, and merge them."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work / "model")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trained = get_peft_model(model, lora)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        trained(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    save(trained.merge_and_unload(), work, "peft")


def train_sft(work: Path) -> None:
    """Run two steps of trl's SFTTrainer on tokens."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(n): n for n in range(67)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    texts = [" ".join(str((start + n) % 67) for n in range(20)) for start in range(4)]
    settings = SFTConfig(
        output_dir=str(work / "sft"),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = SFTTrainer(
        model=str(work / "model"),
        args=settings,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
    )
    trainer.train()
    save(trainer.model, work, "trl")


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    train_lora(directory)
    train_sft(directory)
