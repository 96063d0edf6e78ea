"""From text to a trained model: corpora, tokenizers, token files, and the loader that deals them out."""
