"""Fine-tune a small BERT on texts made here, with a batch size that doubles twice; evaluate, save, and log.

python examples/trainers/transformers_classifier.py
torchrun --nproc-per-node 2 examples/trainers/transformers_classifier.py
"""

import random
import sys

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from variable_batch_size.integrations.transformers import VariableBatchTrainer

GOOD, BAD = ["fine", "great", "lovely", "superb"], ["awful", "bad", "boring", "poor"]
OTHERS = ["a", "the", "film", "story", "cast", "was", "very", "quite"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows these words; a real script loads one."""
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHERS]
    own = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]")


class Reviews(Dataset):
    """Short texts, and whether they praise."""

    def __init__(self, number: int, tokenize: PreTrainedTokenizerFast, seed: int) -> None:
        draw = random.Random(seed)
        self.labels = [draw.randrange(2) for _ in range(number)]
        texts = [
            [*draw.choices(OTHERS, k=draw.randrange(3, 12)), draw.choice(GOOD if label else BAD)]
            for label in self.labels
        ]
        self.rows = tokenize([" ".join(draw.sample(text, len(text))) for text in texts])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return {**{name: values[index] for name, values in self.rows.items()}, "labels": self.labels[index]}


def accuracy(prediction: EvalPrediction) -> dict:
    """Return the share of right answers."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main(folder: str) -> None:
    """Train, and print the accuracy."""
    torch.manual_seed(0)
    tokenize = tokenizer()
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenize), pad_token_id=0, **shape))
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=16,  # the microbatch
        num_train_epochs=3,
        learning_rate=2e-3,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = VariableBatchTrainer(
        model,
        args,
        train_dataset=Reviews(1000, tokenize, seed=1),
        eval_dataset=Reviews(200, tokenize, seed=2),
        data_collator=DataCollatorWithPadding(tokenize),
        compute_metrics=accuracy,
        trace="0:32 20:64 40:128", rule="root", ref_batchsize=32,  # this line, and the name of the class
    )  # fmt: skip
    trainer.train(resume_from_checkpoint="--resume" in sys.argv)
    print(f"accuracy after {trainer.state.global_step} updates: {trainer.evaluate()['eval_accuracy']:.2f}")


if __name__ == "__main__":
    main("tmp_trainer")
