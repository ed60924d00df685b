"""Files that ebbench did not write: every reader of logs, data sets, settings and stored runs opens and decodes here.

Each kind has limits, on bytes, lines, depth, columns, rows and decompression, so that no file keeps a command busy or
takes its memory without end. Whatever is wrong is one InputFileError: the file, the line, and what to do.
"""
