"""What a person sees: text, JSON documents, HTML pages and pictures, from plain data.

It alone knows how a result looks. It opens no checkpoint and reads no file.
"""
