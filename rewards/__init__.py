"""Conversations become scores: BLEU, interactivity, token counts, and how they combine."""
