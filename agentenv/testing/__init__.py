"""What tests of environments are made of: tokenizers that need no download (the scripted engine is in `engines`)."""
