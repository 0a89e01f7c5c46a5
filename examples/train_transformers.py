"""Train a transformers model on a list of dicts of ragged lengths: eight lines."""

from transformers import LlamaConfig, LlamaForCausalLM

from headway import Trainer, TrainingArguments

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
data = [{"input_ids": list(range(i % 9, i % 9 + 5 + i % 17))} for i in range(256)]
args = TrainingArguments(output_dir="llama", num_train_epochs=4, learning_rate=3e-3)
result = Trainer(args=args, model=model, train_dataset=data).train()
print(f"{result.global_step} steps, mean loss {result.training_loss:.3f}, saved in llama/")
