"""Instruction data: conversations, their templates, tokens and packed rows."""
