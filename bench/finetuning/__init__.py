"""The same fine-tuning by this project and by TRL's SFTTrainer, measured alike."""
