"""The command `python -m whiflash_infer`: answers to one prompt, or to a file of them."""
