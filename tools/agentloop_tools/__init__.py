"""Tools that ship with the service, one a file. Each file's header says what isolation it gives."""
