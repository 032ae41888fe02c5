"""Files: byte ranges that are read, targets that appear whole or not at all, the names that they get, and CRC-32.

It knows what an operating system and a file system may do; nothing of what the bytes mean.
"""
