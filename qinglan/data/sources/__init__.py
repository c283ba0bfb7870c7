"""Files, folders and databases of questions as streams of `Record`.

`qinglan.data.workbook` makes rows of them.
"""
