"""The commands of scripts/evaluate.py, a file each, and what they share: common.py."""
