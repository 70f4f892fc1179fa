"""The SGLang engine behind the Engine port."""
