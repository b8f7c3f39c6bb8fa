"""Evaluation and the console command."""
