"""Where questions come from: .xlsx, .csv, .jsonl and .parquet files, folders of them, a database.

Every kind is read as a stream of `records.Record`; `qinglan.data.workbook` makes rows of them.
"""
