"""Text for people, from plain data. Knows no checkpoint and reads no file."""
