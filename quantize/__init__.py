"""Arrays -> QuantizedTensor: the searches, the recipes, the plan and the job. Knows no file format."""
