"""GPU memory and copies, as far as transfers need them; everything that talks to CUDA is imported when first used."""
