"""From text to a trained model: corpora, tokenizers, token files, loader; the trainer, its log, checkpoints, export."""
