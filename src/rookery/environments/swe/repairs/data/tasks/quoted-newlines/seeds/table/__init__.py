from table.reader import rows

__all__ = ["rows"]
