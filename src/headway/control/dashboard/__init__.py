"""The dashboard: runs as their files tell them, over HTTP, for a page in a browser.

Owns: reading runs while they go on, the JSON that the page asks for, the page's files. Does not
own: the server underneath (control/guarded.py), commands (control/schema.py). Needs no torch.
"""
