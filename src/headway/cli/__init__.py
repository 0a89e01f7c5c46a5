"""The command `headway`: one module per verb, imported only when it is asked for."""
